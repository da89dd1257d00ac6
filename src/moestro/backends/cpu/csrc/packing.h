// Between the rows layout of a weight and its packed one; arguments are checked before.
#pragma once

#include "types.h"

namespace moestro {

void pack(const PackArgs& a);
void unpack(const PackArgs& a);

}  // namespace moestro
