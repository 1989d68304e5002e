"""The keys of a config as data: their comments, a JSON schema, typed attributes; and texts that explain them."""
