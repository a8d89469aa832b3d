"""``penstock serve``: an OpenAI-compatible server over one ``AsyncLLM``; ``app.make_app`` embeds it elsewhere."""
