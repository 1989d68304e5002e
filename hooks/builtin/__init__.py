"""The hooks that come with hookline, but for writers and evaluation."""
