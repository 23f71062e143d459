"""Harmony, the chat format of GPT-OSS, for prompts and answers.

An answer is a series of messages. Each is `<|start|>role<|channel|>channel to=recipient
<|constrain|>type<|message|>text<|end|>`, and the prompt ends with `<|start|>assistant`. The channel
`analysis` is reasoning. `final` and `commentary` without a recipient are content. A message with a
recipient is a tool call. docs/format.md of the project openai/harmony describes the format.

A state machine (parser.py) parses answers over the special tokens of the model's tokenizer. It does
not use the library openai-harmony, for three reasons:

* The library raises an error at the first unexpected token. A truncated or unusual answer must
  still return its text.
* It supports only the vocabulary o200k, whose file is not in its package. This parser supports
  every tokenizer with these special tokens.
* It reads the type of a message without a recipient as the recipient.

The tests use the library as the independent reference. The checkpoint's chat template renders
prompts. conversation.py checks messages and tools for it.
"""
