"""The report about the accuracy and the cost of every KV format."""
