"""Speculative decoding: drafts of the MTP module, verified by the target model, exactly.

All positions of a step are known before it begins (`passes`, `rows`); only token ids are data.
Drafts come from
passes of the MTP module (`draft`), which starts from hidden states kept since the step before
(`kept`). The target model computes the newest token and the drafts in one pass and a token is
sampled at every row, with the randomness of its own position; drafts count while they equal those
tokens (`pending`). So the tokens are those of decoding without drafts, whatever the drafts were.
"""
