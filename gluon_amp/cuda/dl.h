// dlopen and others as of glibc 2.27, where they are in libdl.so.2: from glibc 2.34 on, they have a newer version too.
#pragma once
#include <dlfcn.h>

asm(".symver dlopen, dlopen@GLIBC_2.2.5");
asm(".symver dlsym, dlsym@GLIBC_2.2.5");
asm(".symver dladdr, dladdr@GLIBC_2.2.5");
asm(".symver dlerror, dlerror@GLIBC_2.2.5");
