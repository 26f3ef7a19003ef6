"""Methods and measurements of the kNN-LM literature that the product does not need.

Every module is one method. Each uses knnstore through its public faces, its entry points and nothing else.
`knnstore research` lists the commands.
"""
