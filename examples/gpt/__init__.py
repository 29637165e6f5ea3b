"""GPT-2 on mpx: a comparison of precision recipes, and training runs of any size.
README.md has the files in order.
"""
