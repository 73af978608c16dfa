"""The transpiler finds the flagged lookups of a Program and makes them pull from and push to pservers.

`scan` reads a Program, `plan` decides and refuses, `rewrite` changes the Program, `describe` prints the result.
"""
