"""Formats of requests and answers as tables and pure functions: OpenAI, Anthropic, Cohere, Jina, SGLang.

May import `core.errors`.
"""
