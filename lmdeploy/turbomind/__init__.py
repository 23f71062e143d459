"""The engine: loading, the asynchronous face, and the only users of the C++ module."""
