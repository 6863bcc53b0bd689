"""Commands that need more than a few lines; `celo2.cli` imports each when it is called."""
