"""From what the hosts have to the network that they share and the settings that follow, each with its reason. Pure."""
