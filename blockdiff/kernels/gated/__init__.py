"""The gated activation of a dense MLP: gated, and gated_linear from the tokens on."""
