// Kernels that MXNet generates at run time.
#pragma once
#include "compute.h"

std::string compile(const std::string& source, const std::string& kernel);  // the library's path
void* loaded(const std::string& library);                                   // its kernel
void run(void* kernel, void** args, const unsigned grid[3], const unsigned block[3]);
