"""How much to draft: fixed rules, rules that learn, and the controller behind `auto`."""
