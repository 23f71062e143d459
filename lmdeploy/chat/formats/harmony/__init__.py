"""Harmony, the chat format of GPT-OSS: what goes into a prompt, and what comes out of an answer.

An answer is a series of messages, each `<|start|>role<|channel|>channel to=recipient
<|constrain|>type<|message|>text<|end|>`; the prompt ends with `<|start|>assistant`. Channel
`analysis` is reasoning, `final` and `commentary` without a recipient are content, and a recipient
makes a tool call. The format is described in docs/format.md of the project openai/harmony.

Answers are parsed by a state machine of our own (parser.py) over the special tokens of the model's
own tokenizer. The library openai-harmony is not used for it, for three reasons: it raises an error
at the first token that is out of place, while a cut or odd answer has to give the text it has; it
knows one vocabulary, o200k, whose file is not in its package, while any tokenizer with these
special tokens will do here; and it takes the type of a message without recipient for its recipient.
The tests use it as the independent reference.

The checkpoint's chat template renders prompts. conversation.py checks messages and tools for it.
"""
