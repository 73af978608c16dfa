"""Words of the array that tells kernels where the rows of tables are: addresses, sizes and words of blocks.

It is int64 `(n, NUM_WORDS)`, with a row for each table and schema hash by which requests may name it.
"""

from __future__ import annotations

PULL_WORD, PUSH_WORD, ROWS_WORD = 0, 1, 2  # first word of a block that pulls, pushes, or answers; 0 for none
SCHEMA, DIM = 3, 4
FIRST_ROW = 5  # first row of the same table
MARK = 6  # number of the last frame that pushes to the table; in its first row
SALT, CELLS, NUM_CELL_WORDS, CLASSES, NUM_USED, GROWTH = 7, 8, 9, 10, 11, 12
ROWS, NUM_ROW_FLOATS, ROW_STRIDE, STATES, NUM_STATE_FLOATS, STATE_STRIDE, STATE_OFFSET = 13, 14, 15, 16, 17, 18, 19
INITIAL_KIND, INITIAL_VALUES, NUM_INITIAL_VALUES, INITIAL_STREAM, INITIAL_STATE, NUM_STATES = 20, 21, 22, 23, 24, 25
MAX_ROWS, DIRTY, PUSHED_TODAY, NUM_BITMAP_BYTES, OPTIMIZER_STEP, RULE, RULE_GROUP = 26, 27, 28, 29, 30, 31, 32
NUM_WORDS = 33
