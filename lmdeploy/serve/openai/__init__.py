"""The client of LMDeploy 0.18, at its import path."""
