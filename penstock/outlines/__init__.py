"""Answers in points that are decoded side by side: guides, prompts, outlines, and the steps between them."""
