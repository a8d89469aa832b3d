"""The OpenAI API over one engine: from a request's fields to tokens, and from tokens to replies."""
