"""The public options: engine, generation, chat template and KV formats."""
