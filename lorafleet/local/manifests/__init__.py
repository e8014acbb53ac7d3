"""Rendered Kubernetes objects, checked without a cluster: strict schemas, and the API server's rules about two fields.

`check` is entered from the command line; the rules are pure. May import lorafleet's service layer.
"""
