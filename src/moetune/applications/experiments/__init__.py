"""`moetune experiment`: arms of a real server under real load, and what they say."""
