// That this links is the test: the reference stands without the library.
int main() { return 0; }
