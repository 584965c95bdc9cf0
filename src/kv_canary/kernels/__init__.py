"""Device code only: no checks, no allocation. Imported when the triton backend is first used."""
