"""The torch modules of the built-in types, and the block that holds a layer. Importing these needs torch and OLMo."""
