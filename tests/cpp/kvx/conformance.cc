// The conformance tests as C++17.

#include "kvx/conformance.c"
