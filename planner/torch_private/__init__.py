"""The private names of PyTorch that the project uses: each is imported here and nowhere else, with the reason beside it.

PyTorch may change them in any release. What differs between the releases that are supported is decided here, by what is
there, or by the version where nothing else tells. Four modules, for what they import: Dynamo takes a second, Inductor another
one, and not every build has ``torch.distributed``.
"""
