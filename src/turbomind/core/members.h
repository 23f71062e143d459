#pragma once

namespace turbomind {

// Pointers to the members of a struct. The bindings give them to Python under their names.
template <auto... kMembers>
struct MemberList {};

}  // namespace turbomind
