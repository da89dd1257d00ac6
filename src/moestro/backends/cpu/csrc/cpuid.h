// What the processor (and the system) can run.
#pragma once

namespace moestro {

bool cpu_has_avx2();
bool cpu_has_avx512();
// Also asks the system to let this process use the tile registers.
bool cpu_has_amx();

}  // namespace moestro
