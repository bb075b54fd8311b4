"""The playground: a page that chats with the server and shows who proposed each token."""
