#pragma once

// Stands in for the compiler's header of the same name, in front of it in the include path: the
// AVX-512 instructions that the kernels use, for a machine that has AVX2 alone. The functions are
// in namespace turbomind, where the kernels' calls find them before the compiler's functions. A
// kernel that uses an instruction without a function here does not compile.
//
// A register is an array of lanes or two registers of AVX2. Results have the bits that the
// instructions are documented to have, for NaN and out-of-range numbers, too. A misaligned address
// where hardware requires alignment ends the program. What cannot be tested this way: speed,
// inline assembly (dot_pairs_avx512.h and amx/tile_instructions.h have replacements in this
// folder) and the compiler's code for AVX-512.

#include "cpu_shim/convert.h"
#include "cpu_shim/dot.h"
#include "cpu_shim/float.h"
#include "cpu_shim/integer.h"
#include "cpu_shim/move.h"
#include "cpu_shim/permute.h"
