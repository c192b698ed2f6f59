"""Prefix reuse: what one request computed of its first tokens, later ones need not compute again.

Read next: `cache.py` (what is kept and found), `contents.py` (what two blocks have in common).
"""
