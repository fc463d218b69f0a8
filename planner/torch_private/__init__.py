"""The private names of PyTorch that the project uses: each is imported here and nowhere else, with the reason next to it.

PyTorch may change them in any release. Differences between the supported releases are handled here, by feature tests, or by
version if necessary. There are separate modules by import cost: Dynamo takes a second, Inductor another one, and not every build
has ``torch.distributed``.
"""
