"""What clients may send and engines answer, as tables and pure functions: OpenAI, Anthropic, Cohere, Jina, SGLang.

May import `core.errors`.
"""
