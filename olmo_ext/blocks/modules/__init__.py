"""The torch modules of the built-in types; importing this needs torch and OLMo."""
