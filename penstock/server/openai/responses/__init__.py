"""OpenAI's Responses API, as far as it needs no memory of earlier responses: every request is a whole conversation."""
