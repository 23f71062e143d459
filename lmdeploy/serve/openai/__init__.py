"""The HTTP client, at the import path of LMDeploy 0.18."""
