"""Who plays the user: a script, a language model over HTTP, or another policy."""
