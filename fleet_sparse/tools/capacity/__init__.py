"""The capacity model behind `fleet-sparse plan`. `docs/scaling.md` states its formulas and how far it is off."""
