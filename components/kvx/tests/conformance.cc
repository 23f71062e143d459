// The conformance tests as C++17.

#include "conformance.c"
