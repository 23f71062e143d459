"""The command `lmdeploy`."""
