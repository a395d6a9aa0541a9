// The names of BLAS that MXNet's host code uses. Device code is compiled from the same files and
// calls none of them, so the declarations accept any arguments.
#pragma once
enum CBLAS_ORDER { CblasRowMajor = 101, CblasColMajor = 102 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112, CblasConjTrans = 113 };
enum CBLAS_UPLO { CblasUpper = 121, CblasLower = 122 };
enum CBLAS_DIAG { CblasNonUnit = 131, CblasUnit = 132 };
enum CBLAS_SIDE { CblasLeft = 141, CblasRight = 142 };
extern "C" {
float cblas_sdot(...);
double cblas_ddot(...);
void cblas_sgemm(...);
void cblas_dgemm(...);
void cblas_sgemv(...);
void cblas_dgemv(...);
void cblas_sger(...);
void cblas_dger(...);
void cblas_strsm(...);
void cblas_dtrsm(...);
void cblas_strmm(...);
void cblas_dtrmm(...);
void cblas_ssyrk(...);
void cblas_dsyrk(...);
}
