"""The report on the accuracy and the cost of KV formats."""
