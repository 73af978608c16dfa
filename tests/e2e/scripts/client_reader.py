"""A reader of the clients' files, for a pipe_command: `label slot:id slot:id ...` to the text of data sets.

With the argument `single`, the label and the last id of each slot alone.
"""

import sys

import paddle.distributed.fleet as fleet

NUM_SLOTS = 3


class Reader(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def reader():
            label, *words = line.split()
            slots = [("show", [1]), ("click", [int(label)])] + [(str(number), []) for number in range(NUM_SLOTS)]
            for word in words:
                slot, feasign = word.split(":")
                slots[2 + int(slot)][1].append(int(feasign))
            slots = [(name, values or [0]) for name, values in slots]
            yield [(name, values[-1:]) for name, values in slots[1:]] if "single" in sys.argv else slots

        return reader


if __name__ == "__main__":
    Reader().run_from_stdin()
