"""A hierarchy of parameter servers: a host's server joins its workers' gradients on their way to the root servers.

A host's server is a parameter server to the workers of its host, and one worker to the roots. It has no optimizer. It
keeps the newest parameters that it got from the roots, and the bookkeeping of its workers' pushes.
"""
