"""The public options: of the engine, of one generation, of chat templates, and the KV formats."""
