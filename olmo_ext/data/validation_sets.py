"""The validation sets of paper A (arXiv 2602.06471), tokenised with dolma2 by the makers of OLMo."""

PERPLEXITY_SETS = ("dolma_common-crawl", "dolma_stack", "m2d2_s2orc", "wikitext_103")
"""Names of their files, without `.npy`, in the folder that `olmo-ext eval --prepare` fills."""
