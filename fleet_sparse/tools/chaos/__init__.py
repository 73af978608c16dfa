"""Jobs whose pservers are killed, suspended and lose power, and whose rows are counted afterwards."""
