"""The live view: the web page, and the engine at work as a stream of frames."""
