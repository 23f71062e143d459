// doctest's own code and main(), compiled once for all tests: it takes ten times as long as a test.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
