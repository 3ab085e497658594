"""The same methods across sites, over Flower: messages, the federation behind ``ask``, the two apps, their set-up.

Flower is the extra ``rescene[deploy]``; nothing outside the functions that need it imports it.
"""
