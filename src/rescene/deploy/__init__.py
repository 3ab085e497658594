"""The same methods across sites, over Flower.

    exchange, message_bytes     what server and sites say to each other, and its bytes
    server, answers             the server's side: the transport, and what is taken from a site and kept
    site, site_config           a site's side: its work and memory, and what its site.yaml allows
    summing, keys               sums that only all sites together open; keys and certificates
    federation_folder, plan_file, processes, operator    an operator's folder and plan, what runs, what to see of it
    checks, trial               looking before it counts
    flower, executor            all that imports Flower

Flower is the extra ``rescene[deploy]``; nothing outside the functions that need it imports it.
"""
