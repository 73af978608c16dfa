"""The transpiler: finds the flagged lookups of a Program and makes them pull from and push to pservers.

`scan` reads a Program, `plan` decides (and makes every refusal), `rewrite` acts, `describe` shows the result.
"""
